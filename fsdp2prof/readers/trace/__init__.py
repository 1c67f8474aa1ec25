"""Traces of kernels and operators to tables: Kineto's JSON and Nsight Systems' sqlite."""
