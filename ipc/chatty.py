"""Libraries that log each of their steps: turned down in the daemon and in its workers alike."""

import logging

# At info some of these log every request, at debug every byte. Their warnings stay.
CHATTY = (
    *("PIL", "aiohttp", "asyncio", "boto3", "botocore", "chardet", "charset_normalizer"),
    *("filelock", "fontTools", "h2", "hpack", "httpcore", "httpx", "matplotlib", "playwright"),
    *("pyppeteer", "s3transfer", "selenium", "seleniumwire", "trafilatura", "urllib3"),
    *("websocket", "websockets"),
)


def turn_down(level: str) -> None:
    """Have these libraries log warnings only, unless everything is wanted (level "debug").

    A library whose level somebody has chosen already keeps it.
    """
    if level.lower() == "debug":
        return
    for name in CHATTY:
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.WARNING)
