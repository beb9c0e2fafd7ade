"""Pure, no I/O: what is looked at, as HTML for notebooks and pages, and as Matplotlib figures, made from plain values."""
