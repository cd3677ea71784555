"""A step a call, pipelined and waited for, of one launch: with the command buffers that XLA takes, without, and with all."""
import dataclasses, os, sys
sys.path.insert(0, os.getcwd())
import benchmarks.run as run
from benchmarks.operation import GRAPH
op = run.OPERATIONS["decode_step"]
kind = type(op)
usual = kind.implementations
def implementations(self, *a, **k):
    found = dict(usual(self, *a, **k))
    f = found["fused"]
    found["fused/plain"] = dataclasses.replace(f, name="fused/plain", options={"xla_gpu_enable_command_buffer": ""})
    found["fused/graph"] = dataclasses.replace(f, name="fused/graph", options=GRAPH)
    return found
kind.implementations = implementations
run.main(sys.argv[1:])
