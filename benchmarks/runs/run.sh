#!/bin/bash
# run.sh PHASE... ; a phase is JOB,JOB,... run side by side; a job NAME:SECONDS:GPUS[:SCRIPT]  (GPUS like 0+1)
. .wheels/activate.sh
# What prepare.sh, rehearsals and pack_cache.sh have left: kernels that are compiled.
[ -f .wheels/triton_cache.tar.xz ] && tar -xJf .wheels/triton_cache.tar.xz -C / && . /tmp/pack/device.sh
export COMMIT=${COMMIT:-$(cat .gpu/commit 2>/dev/null || git rev-parse --short HEAD)}
export PYTHONUNBUFFERED=1
HERE=$PWD; BASE=$PYTHONPATH
for phase in "$@"; do
  for job in ${phase//,/ }; do
    IFS=: read name seconds gpus script <<<"$job"
    d=/tmp/runs/$name; mkdir -p /tmp/runs; [ -n "$script" ] || script=.gpu_request.sh
    if [ ! -d $d ]; then mkdir -p $d; if [ -f .gpu/$name.tar.xz ]; then tar -xJf .gpu/$name.tar.xz -C $d; else cp -a $HERE/. $d/; fi; fi
    tag=$name.$(basename $script .sh | tr -d .@)
    ( cd $d; export CUDA_VISIBLE_DEVICES=${gpus//+/,} PYTHONPATH=$d:${BASE//$HERE/$d} JOB=$name; s=$(date +%s); mkdir -p $d/out; export RES=$d/out
      case $script in @*) script=$HERE/.gpu/${script#@};; esac; timeout -k 5 $seconds bash $script > $d/$tag.log 2>&1; echo "== $tag rc=$? $(( $(date +%s)-s )) s" >> $d/$tag.log ) &
  done
  wait
  for job in ${phase//,/ }; do
    IFS=: read name seconds gpus script <<<"$job"; [ -n "$script" ] || script=.gpu_request.sh
    d=/tmp/runs/$name; tag=$name.$(basename $script .sh | tr -d .@)
    echo "##### $tag"; tail -n 60 $d/$tag.log; cp $d/$tag.log $OUT/ ; 
  done
done
(cd /tmp/runs && tar -cJf $OUT/out.tar.xz */out)
[ -z "$TRITON_HOME" ] || echo "kernels compiled here: $(find /tmp/pack/home -name '*.ttgir' | wc -l) (0 if all were found)"
true
