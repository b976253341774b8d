"""Runs of many processes under a scheduler: a job script, and trials of one on this machine.

The trials kill processes on purpose and compare the end, bit for bit, with that of an undisturbed run; they
need Debian's ``slurm-wlm`` or ``openmpi-bin``.
"""
