"""Bytes as people read them, for reasons that the core reports."""

KIBIBYTE = 1024
MEBIBYTE = 1024 * KIBIBYTE
GIBIBYTE = 1024 * MEBIBYTE


def shown(size: float) -> str:
    if size >= GIBIBYTE:
        return f"{size / GIBIBYTE:.1f} GiB"
    if size >= MEBIBYTE:
        return f"{size / MEBIBYTE:.0f} MiB"
    return f"{size / KIBIBYTE:.0f} KiB"
