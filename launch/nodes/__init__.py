"""Starting the ranks of one node or many: addresses, ports, the meeting of the nodes, torchrun and signals."""
