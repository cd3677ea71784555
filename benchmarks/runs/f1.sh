export XLA_PYTHON_CLIENT_PREALLOCATE=false
timeout -k 5 ${LIMIT:-208} python3 -m tests.helpers.training --steps 10000 --seconds ${STEPS_SECONDS:-130} --only "4 processes, 2 x 2" > $RES/training.txt 2>&1; echo rc=$?; tail -n 12 $RES/training.txt | cut -c1-900
