"""A loop of steps with embedding and choice, and a step alone: us a step of 20 queued programs of 32 steps. 2 GPUs."""
import os, re
src = open("benchmarks/runs/loops2.py").read()
a = src.index("cases = ["); b = src.index("ranks = jax.device_put")
src = src[:a] + 'cases = [("all", ALL, 1, {}), ("bare", (), 1, {})]\n' + src[b:]
src = src.replace("        n = 6\n", "        n = 20\n")
src = src[:src.index("from jaxtaxfree.taxes import profile")] + "os._exit(0)\n"
exec(compile(src, "loops3", "exec"))
