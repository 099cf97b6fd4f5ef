"""``bench eplb-gpu``: what moving experts costs on a GPU, and what their uneven load does."""
