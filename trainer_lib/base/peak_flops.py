"""Peak speeds of devices, for the model FLOPs utilization (MFU): dense matrix products, as the makers state them.

MFU is what a training computes over what its devices could compute at their peak: model FLOPs of the steps / (seconds *
devices * peak FLOP/s). Model FLOPs are those that the model needs, without recomputation. Source: Chowdhery et al.,
"PaLM" (2022), appendix B. It counts 6 FLOPs per parameter and token, and those of attention. What is counted here is
documented in `Trainer.floating_point_ops`; its default leaves attention out, so MFU is too low for long sequences.
"""

from __future__ import annotations

# Part of the name that the driver gives -> TFLOP/s with 16-bit numbers (fp32 sums), TF32, and fp32. From the data
# sheets of NVIDIA, without sparsity. The first row that fits is taken, so longer names come first.
_PEAKS: tuple[tuple[str, float, float, float], ...] = (
    ("B200", 2250.0, 1100.0, 75.0),
    ("H200", 989.4, 494.7, 66.9),
    ("GH200", 989.4, 494.7, 66.9),
    ("H100 NVL", 835.5, 417.8, 60.0),
    ("H100 PCIe", 756.5, 378.0, 51.2),
    ("H100", 989.4, 494.7, 66.9),
    ("H800", 989.4, 494.7, 66.9),
    ("A100", 312.0, 156.0, 19.5),
    ("A800", 312.0, 156.0, 19.5),
    ("A30", 165.0, 82.0, 10.3),
    ("L40S", 362.0, 183.0, 91.6),
    ("L40", 181.0, 90.5, 90.5),
    ("L4", 121.0, 60.0, 30.3),
    ("V100", 125.0, 15.7, 15.7),
    ("T4", 65.0, 8.1, 8.1),
    ("RTX 4090", 165.2, 82.6, 82.6),
    ("RTX 3090", 71.0, 35.6, 35.6),
)
_COLUMNS = {"bf16": 1, "fp16": 1, "tf32": 2, "fp32": 3}


def find_peak(device: str, precision: str) -> float | None:
    """Peak FLOP/s of one device; None where the table does not have it, which is so for every CPU.

    Args:
        device: its name as the driver gives it ("NVIDIA H100 80GB HBM3").
        precision: of matrix products: "bf16", "fp16", "tf32" or "fp32".
    """
    words = f" {device.replace('-', ' ')} "
    row = next((row for row in _PEAKS if f" {row[0]} " in words), None)
    return None if row is None else float(row[_COLUMNS[precision]]) * 1e12


def utilization(flops: float, seconds: float, *, devices: int, device: str, precision: str) -> float | None:
    """MFU, from 0 to 1; None where the peak is not known or nothing was measured.

    Args:
        flops: model FLOPs of all devices in those seconds.
        seconds: spent in training steps, without evaluation and saving.
        devices: their number.
    """
    peak = find_peak(device, precision)
    return None if peak is None or seconds <= 0 or flops <= 0 else flops / (seconds * devices * peak)
