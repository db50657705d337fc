# SPDX-License-Identifier: Apache-2.0
"""`python scan.py MIB PASSES`: fills an array, then reads it from end to end, again and again.

Prints a sum.
"""

import json
import sys

import numpy as np

BLOCK = 1 << 16

if __name__ == "__main__":
    numbers = np.empty(int(sys.argv[1]) << 17)
    for start in range(0, len(numbers), BLOCK):
        numbers[start : start + BLOCK] = start
    total = 0.0
    for _ in range(int(sys.argv[2])):
        for start in range(0, len(numbers), BLOCK):
            total += float(np.sqrt(numbers[start : start + BLOCK]).sum())
    print(json.dumps({"check": {"sum": total}}))
