"""What instructions cost that are not in a cache: straight code of some KB, again and again, and once behind 1 GB of loads."""
import torch, sys
def source(n):
    # n instructions of 16 bytes: independent chains of FFMA
    body = "\n".join(f"a{i % 8} = a{i % 8} * b + c;" for i in range(n))
    return '''
extern "C" __global__ void k(long long* out, float b, float c, int passes) {
  float a0=b,a1=b,a2=b,a3=b,a4=b,a5=b,a6=b,a7=b;
  for (int p = 0; p < passes; p++) {
    long long s = clock64();
%s
    long long e = clock64();
    if (threadIdx.x == 0) out[(long long)blockIdx.x * 64 + p] = e - s;
  }
  if (a0+a1+a2+a3+a4+a5+a6+a7 == 12345.f) out[0] = 0;
}''' % body
big = torch.empty(1 << 28, device="cuda")
for kb in (8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 144, 160, 192, 256):
    n = kb * 64
    k = torch.cuda._compile_kernel(source(n), "k")
    out = torch.zeros(132 * 64, dtype=torch.int64, device="cuda")
    line = f"{kb:4d} KB {n:6d} instr:"
    for threads in (32, 256):
        for _ in range(3):
            big.add_(1.0); torch.cuda.synchronize()
            k(grid=(132, 1, 1), block=(threads, 1, 1), args=[out, 1.0, 0.5, 8])
            torch.cuda.synchronize()
        t = out.view(132, 64)[:, :8].double().median(0).values.tolist()
        line += f"  {threads} threads: cold {t[0]:8.0f}  second {t[1]:8.0f}  steady {t[5]:8.0f} cycles, steady per instr {t[5] / n:.2f}"
    print(line, flush=True)
