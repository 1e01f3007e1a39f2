"""The commands of ``python -m cudnn_dsa``: one module or package each, and what they share."""
