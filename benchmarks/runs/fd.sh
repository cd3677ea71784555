export XLA_PYTHON_CLIENT_PREALLOCATE=false XLA_FLAGS=--xla_gpu_autotune_level=0
T=tests/gpu/test_gpu_decode_step.py
CUDA_VISIBLE_DEVICES=0,1 timeout -k 5 75 python3 -u -m pytest -p no:cacheprovider -v -m "not soak" --durations=5 "$T::test_a_rank_that_does_not_arrive_is_named" > $RES/dead.txt 2>&1 &
CUDA_VISIBLE_DEVICES=2,3 timeout -k 5 75 python3 -u -m pytest -p no:cacheprovider -v -m "not soak" --durations=5 "$T::test_parity_with_a_cache_in_pages[1-hopper]" "$T::test_beside_another_kernel" > $RES/pages.txt 2>&1 &
wait
grep -a -h -E "PASSED|FAILED|SKIPPED|ERROR|passed|failed|s call" $RES/dead.txt $RES/pages.txt | cut -c1-160
