"""Pruning solvers: magnitude, Wanda, SparseGPT and the joint search `prune`.

They choose the zeros of one weight [O, I] from statistics of its inputs. Start with `zeros.py`, which has the masks and
the two simplest methods.
"""
