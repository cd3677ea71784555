import re,sys,collections
cur=("",0); seq=[]
for l in open(sys.argv[1]):
    m=re.search(r'//## File "([^"]+)", line (\d+)', l)
    if m: cur=(m.group(1).split("/")[-1],int(m.group(2))); continue
    if re.match(r'\s+/\*[0-9a-f]{4,5}\*/\s', l): seq.append(cur)
W=150
for i in range(0,len(seq),W):
    c=collections.Counter(seq[i:i+W])
    k=[(f,n) for (f,n),_ in c.most_common() if f in("phases.py","hopper.py","attention_cores.py","attention.py")]
    f=collections.Counter(x[0] for x in seq[i:i+W])
    print(i, sorted(k)[:9], dict(f.most_common(4)))
