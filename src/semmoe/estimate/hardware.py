"""What a GPU can do by its data sheet, and the share of it that kernels reach.

Peak rates are dense ones. The shares were fitted to single operations of DeepSeek-V3 on an H200 under SGLang 0.5.10 and
0.5.14, as aiconfigurator 0.12.0 has them in its tables (Apache-2.0), all of them with uniform routing:

    memory    routed experts in decode on 4 to 256 ranks: 11.6 us per expert of 44 MB, after EXPERTS
    dense     8,192 rows by 7,168 x 4,096 in FP8 take 378 us, by 2,048 x 7,168 198 us
    experts   routed experts in prefill on 16 ranks: 2.69 ms more for 32,768 more pairs
    core      MLA in decode: 128 requests take 121 us more with 2,048 keys than with one
    KERNEL, QUANTIZE   the MLA block with one request and one key takes 91.5 us, of which weights take 53
    LAUNCH    the MLA block in prefill takes .33 ms more than operations account for, at every length

On other GPUs the same shares are assumed. What semmoe itself adds (`semmoe.cost.hooks`) was measured on HOOKED_ON.
"""

from dataclasses import dataclass

from semmoe.calibration import Links

MEMORY, DENSE, EXPERT, CORE = 0.79, 0.64, 0.55, 0.60  # shares of the data sheet's rates
KERNEL = 4e-6  # seconds that a kernel takes at least, in a CUDA graph
QUANTIZE = 4e-6  # in addition for an FP8 product, whose inputs are quantized first
EXPERTS = 19e-6  # of the kernels of a layer's routed experts together
LAUNCH = 330e-6  # of a layer in prefill, whose kernels are launched one by one
COMMUNICATING = 20 / 132  # of the SMs of a Hopper GPU are DeepEP's in normal mode
FITTED_ON, HOOKED_ON = "h200", "h100"


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet."""

    name: str
    bf16_teraflops: float
    fp8_teraflops: float
    memory_gigabytes_per_second: float
    gigabytes: float
    system: str | None  # its name in aiconfigurator

    def flops_per_second(self, stored: float) -> float:
        """The peak rate for weights of `stored` bytes; those of less than one byte are unpacked to BF16."""
        return (self.fp8_teraflops if stored == 1 else self.bf16_teraflops) * 1e12

    @property
    def memory_rate(self) -> float:
        """Bytes per second that kernels reach."""
        return MEMORY * self.memory_gigabytes_per_second * 1e9


# NVIDIA's data sheets of H100, H200, HGX B200 and B300, GB200 NVL72 and GB300 NVL72; the H800 is an H100 whose NVLink
# has 400 GB/s in both directions together, in place of 900 (DeepSeek-V3 Technical Report, 2024).
GPUS = {
    one.name: one
    for one in (
        Gpu("h100", 989, 1979, 3350, 80, "h100_sxm"),
        Gpu("h800", 989, 1979, 3350, 80, None),
        Gpu("h200", 989, 1979, 4800, 141, "h200_sxm"),
        Gpu("b200", 2250, 4500, 8000, 180, "b200_sxm"),
        Gpu("b300", 2250, 4500, 8000, 270, "b300_sxm"),
        Gpu("gb200", 2500, 5000, 8000, 186, "gb200"),
        Gpu("gb300", 2500, 5000, 8000, 279, "gb300"),
    )
}


def gpu_of(name: str | None, links_name: str, links: Links) -> Gpu:
    """The GPU of a given name, or the one that shipped links were measured on."""
    found = GPUS.get(name or links_name.split("-")[0])
    if found is None:
        raise ValueError(f"links {links.name!r} do not say what GPU they join: give --gpu {', '.join(GPUS)}")
    return found
