/* SPDX-License-Identifier: Apache-2.0 */
/*
 * push_keys TEXT: pushes TEXT and a line end into the controlling terminal, as if they had been typed.
 * Exit code 0 where the kernel allows it, 2 where it does not, 1 without a terminal.
 */
#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

static int push(int fd, const char *text)
{
	for (; *text; text++)
		if (ioctl(fd, TIOCSTI, text) != 0)
			return -1;
	return 0;
}

int main(int argc, char **argv)
{
	int fd = open("/dev/tty", O_RDWR);

	if (fd < 0 || argc != 2)
		return 1;
	return push(fd, argv[1]) || push(fd, "\n") ? 2 : 0;
}
