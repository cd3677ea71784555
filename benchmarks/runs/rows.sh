# row NAME SECONDS SHAPE IMPLEMENTATIONS MODES
row() {
  timeout -k 5 $2 python3 -u benchmarks/run.py decode_step --world 2 --modes $5 --seconds-per-shape 2 --shapes $3 --implementations $4 --commit ${COMMIT:?} --json $RES/$1.json > $RES/$1.txt 2>&1
  echo "== $1 rc=$?"; grep -a -E "refused|rror|left out|checked and right" $RES/$1.txt | cut -c1-220 | head -n 4; grep -a "|" $RES/$1.txt | grep -v "^|---" | cut -c1-200
}
