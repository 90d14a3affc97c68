"""Training state of a PyTorch program, to raw memory and back.

``collect`` finds what the state is, ``image`` lays it out as bytes, ``copy`` brings it into a slot's memory, and
``restore`` puts it back in place. All of it runs inside the training process: it draws from no generator, changes no
value and no version counter, and raises nothing but ``CaptureError``. Torch is imported by the modules that need it;
this one imports nothing.
"""
