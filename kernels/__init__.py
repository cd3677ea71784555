"""The Triton kernels of jaxtaxfree. Installed as `jaxtaxfree.kernels`."""

if __name__ != "jaxtaxfree.kernels":
    raise ImportError(
        f"These are the kernels of jaxtaxfree, imported as {__name__!r}: import `jaxtaxfree.kernels` instead, "
        "from an installed jaxtaxfree (`pip install -e .` in its repository)."
    )
