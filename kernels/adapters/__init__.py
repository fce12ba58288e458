"""Adapters that put the policy and the fused op into the modules of a training framework."""
