"""The live part of bench-analyzer."""
