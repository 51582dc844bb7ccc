"""What can run codecs and copy: one file per kind of device."""
