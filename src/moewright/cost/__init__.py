"""Memory and time of a layout: the formulas of docs/formulas.md as functions over arrays."""
