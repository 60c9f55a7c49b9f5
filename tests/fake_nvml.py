"""A management library of NVIDIA that answers as on a host with two GPUs."""


class Nvml:
    """Answers as NVML does for two GPUs, of which the second has no power meter."""

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        handle._obj.value = index.value + 1
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle, rates):
        rates._obj.gpu, rates._obj.memory = 10 * handle.value, 50
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle, memory):
        memory._obj.used = 2**33
        return 0

    def nvmlDeviceGetPowerUsage(self, handle, number):
        number._obj.value = 350_500
        return 0 if handle.value == 1 else 3

    def nvmlDeviceGetTemperature(self, handle, kind, number):
        number._obj.value = 61 + kind.value
        return 0

    def nvmlDeviceGetClockInfo(self, handle, kind, number):
        number._obj.value = 1980 if kind.value == 1 else 0
        return 0
