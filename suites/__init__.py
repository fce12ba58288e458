"""The rows of the matrix, and the checks that join subject, oracle and judge."""
