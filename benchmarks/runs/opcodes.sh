B=/work/main/.venv/lib/python3.12/site-packages/triton/backends/nvidia/bin
c=$(find /tmp/pack/home -name "*.ptx" -printf "%T@ %p\n" | sort -n | tail -1 | cut -d" " -f2)
$B/ptxas -arch=sm_90a $c -o /tmp/x.cubin -v 2>&1 | grep -E "registers|spill" | head -2
$B/nvdisasm -c /tmp/x.cubin 2>/dev/null | grep -oE "/\*[0-9a-f]{4,5}\*/ +(@!?U?P[0-9T]+ )?[A-Z0-9_.]+" | awk '{print $NF}' | sort | uniq -c > $1; awk '{s+=$1} END {print s}' $1
