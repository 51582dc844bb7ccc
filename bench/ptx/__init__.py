"""The CUDA kernels without a GPU: their PTX in an interpreter, their machine code counted."""
