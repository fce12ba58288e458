"""The judge: matrix, execution, verdicts, records. It knows no kernel and no oracle by name."""
