#!/bin/bash
# mpirun.sh NUM_RANKS PROGRAM [ARGUMENT...]: mpirun as tests need it: more ranks than processors,
# bound to none of them (or to TESSERA_TEST_BIND_TO), and allowed for root where tests run as root.
set -u
num_ranks=$1
shift
if [ "$(id -u)" = 0 ]; then
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
export OMP_WAIT_POLICY=passive
exec mpirun --oversubscribe --bind-to "${TESSERA_TEST_BIND_TO:-none}" -n "$num_ranks" "$@"
