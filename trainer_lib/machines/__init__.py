"""The processes of one machine, and the rendezvous of several."""
