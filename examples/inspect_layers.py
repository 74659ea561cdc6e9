"""Where compression hurts: the error of each linear, and how much of it GPTQ took away, worst first."""

from pathlib import Path
from tempfile import TemporaryDirectory

import attar

with TemporaryDirectory() as folder:
    done = attar.compress_request(
        attar.CompressionRequest(
            "demo", Path(folder, "out"), recipe="gptq-w4g128", calibration="self", samples=8, length=64
        )
    )

print(f"{done.recipe}: {done.bits_per_weight:.3f} bits per weight, {done.bytes / done.source_bytes:.0%} of the bytes\n")
print(f"{'linear':<36} {'error':>8} {'rounded':>8}   (of the output, relative)")
for record in sorted(done.records, key=lambda each: each.error, reverse=True)[:10]:
    print(f"{record.name:<36} {record.error:8.2%} {record.rtn_error:8.2%}")
