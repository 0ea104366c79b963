"""Runs a program of compat.py in the given dtype, without a change to the program.

compat_driver.py float64 compat_programs/plain/resnet.py weights.pt
"""

import runpy
import sys

import torch

if __name__ == "__main__":
    _, dtype, program, *arguments = sys.argv
    torch.set_default_dtype(getattr(torch, dtype))
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")
