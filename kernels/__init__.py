"""What this project ships and qualifies: QDQ, the fused GDN op, the execution policy, the adapters."""
