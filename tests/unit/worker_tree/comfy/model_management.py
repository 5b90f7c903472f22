import threading


class InterruptProcessingException(BaseException):
    pass


flag = threading.Event()


def interrupt_current_processing(value=True):
    flag.set() if value else flag.clear()


def throw_exception_if_processing_interrupted():
    if flag.is_set():
        flag.clear()
        raise InterruptProcessingException()


def unload_all_models():
    pass


def soft_empty_cache():
    pass
