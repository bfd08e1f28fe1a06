# Sourced by scripts: run_mpi RANKS PROGRAM [ARG ...] with the flags that Open MPI needs here.

# mpirun binds every rank to one core unless told otherwise, and wants root to say so twice.
run_mpi() {
  local ranks=$1
  shift
  if [ "$(id -u)" = 0 ]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  fi
  mpirun --bind-to none ${MPIRUN_FLAGS:-} -n "$ranks" "$@"
}
