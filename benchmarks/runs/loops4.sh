export XLA_PYTHON_CLIENT_PREALLOCATE=false
case $JOB in
 s) C='[{"pace":850},{"pace":850,"patience":800},{"pace":850,"patience":1000},{"pace":850,"patience":1200}]';;
 n) C='[{"pace":850},{"pace":850,"patience":800},{"pace":850,"patience":1000},{"pace":850,"patience":1200},{"pace":850,"patience":1500}]';;
 h) C='[{"pace":850,"patience":800},{"pace":850,"patience":1000},{"pace":850,"patience":1200},{"pace":800,"patience":1000},{"pace":900,"patience":1000}]';;
esac
echo $JOB; timeout -k 5 60 python3 -u benchmarks/runs/loops4.py "$C" > $RES/loops4.txt 2>&1; tail -n 6 $RES/loops4.txt | cut -c1-150
