#!/bin/bash
SIDE=lhs bash benchmarks/runs/tokgrad.sh
