. .wheels/activate.sh
export XLA_PYTHON_CLIENT_PREALLOCATE=false
e() { timeout 200 python3 -u .gpu/exp.py "$@" 2>&1 | grep -a -E "us |Error|rror" & }
e 2 8b8 4 '{}'; e 2 8b8 1 '{}'; e 4 8b8 1 '{}'; e 3 8b8 1 '{}'; e 1 8b8 0 '{}'; e 1 8b8 4 '{}'
e 1 q4 4 '{}'; e 1 q4 4 '{"in_flight":4}'; e 1 q4 4 '{"stage":4096,"num_stages":24,"in_flight":4}'; e 1 q4 4 '{"stage":4096,"num_stages":24,"in_flight":6}'
e 1 q4 0 '{}'; e 1 70b4 4 '{}'; e 1 70b4 4 '{"in_flight":4}'; e 1 8b4 4 '{}'; e 1 8b4 4 '{"in_flight":3}'
wait
timeout 70 python3 benchmarks/step_clock.py --world 1 --shape 1,8192,8,5120,32,4,128,12800,9496 2>&1 | tail -n 12
