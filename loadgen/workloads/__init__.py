"""Workloads: what is asked, how long it is, when it comes and from whom; made from models or read from traces."""
