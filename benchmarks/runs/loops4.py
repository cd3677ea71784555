"""Configs of decode_step in a loop with embedding and choice: us a step of 20 queued programs of 32 steps. 2 GPUs.
python benchmarks/runs/loops4.py '[{"pace": 850}, ...]' [SHAPE]"""
import json, os, sys
configs = json.loads(sys.argv[1]); sys.argv = sys.argv[:1] + sys.argv[2:]
src = open("benchmarks/runs/loops2.py").read()
if len(sys.argv) > 1: src = src.replace("1,8192,8,4096,8,2,128,3584,32064", sys.argv[1])
src = src.replace('config={"kernel": "hopper", "pace": 850}', 'config={"kernel": "hopper"} | parts[-1]')
src = src.replace('(*problem.operands, embed, tokens, ranks)\n', '(*problem.operands, embed, tokens, ranks)\n')
a = src.index("cases = ["); b = src.index("ranks = jax.device_put")
src = src[:a] + 'cases = [(json.dumps(c), (*ALL, c), 1, {}) for c in configs]\n' + src[b:]
src = src.replace("        n = 6\n", "        n = 20\n")
src = src[:src.index("from jaxtaxfree.taxes import profile")] + "os._exit(0)\n"
exec(compile(src, "loops4", "exec"))
