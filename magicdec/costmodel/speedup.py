"""The speedup formula of MagicDec (arXiv 2408.11049, section 3) and of speculative decoding (Leviathan et al. 2023)."""


def omega(gamma: int, alpha: float) -> float:
    """Expected tokens per round: (1 - alpha^(gamma+1)) / (1 - alpha), bonus included."""
    return sum(alpha**i for i in range(gamma + 1))


def alpha_from_acceptance_length(length: float, gamma: int) -> float:
    """The alpha in [0, 1] whose omega is `length`; the inverse of `omega`, by bisection."""
    low, high = 0.0, 1.0
    if length <= 1.0 or gamma == 0:
        return 0.0
    if length >= gamma + 1:
        return 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if omega(gamma, middle) < length else (low, middle)
    return (low + high) / 2


def speculative_time(gamma: int, alpha: float, draft: float, verify: float, select: float = 0.0) -> float:
    """Time per token T_SD = (gamma (T_D + T_select) + T_V(gamma)) / Omega, in the unit of its arguments."""
    return (gamma * (draft + select) + verify) / omega(gamma, alpha)
