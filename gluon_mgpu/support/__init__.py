"""Files, errors, notices, child processes and MPI. This package imports no other subpackage."""
