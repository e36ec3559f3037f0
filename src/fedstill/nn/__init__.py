"""Any `nn.Module` as a pure function, divided by head or by channel."""
