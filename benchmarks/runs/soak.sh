# LIST: a file of tests; PARTS: of WORKERS each, none waits for a clock.
export CUDA_VISIBLE_DEVICES= JAX_PLATFORMS=cpu OMP_NUM_THREADS=1
cat > /tmp/soak_$LIST.py <<'P'
import sys, pytest
tests = open(sys.argv[1]).read().split("\n")
sys.exit(pytest.main(["-p", "no:cacheprovider", "-v", "-m", "soak", "-n", sys.argv[2], "--dist", "worksteal", *[t for t in tests if t]]))
P
timeout -s INT -k 8 ${LIMIT:-225} nice -n 19 python3 /tmp/soak_$LIST.py benchmarks/runs/soak_$LIST.txt ${WORKERS:-60} > $RES/soak_$LIST.txt 2>&1
echo rc=$?; tail -n 4 $RES/soak_$LIST.txt | cut -c1-200; grep -c PASSED $RES/soak_$LIST.txt; grep -c FAILED $RES/soak_$LIST.txt
