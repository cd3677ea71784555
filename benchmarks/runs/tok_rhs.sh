#!/bin/bash
SIDE=rhs bash benchmarks/runs/tokgrad.sh
