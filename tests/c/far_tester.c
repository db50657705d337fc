// SPDX-License-Identifier: Apache-2.0
/*
 * A process with far memory as the device sees it, told what to do by lines on its standard input:
 *
 *     far_tester JOB_FD
 *
 *     hello            says hello on the job's socket; hello again after the device's end is gone:
 *                      as the client that it was. Answers `refused CODE` (0: it was taken)
 *     write BLOCK N    fills a block with the byte N. Answers the device's result
 *     read BLOCK N     reads a block. Answers the result, then whether all of it is N
 *     gone             answers when the device's end of its own socket pair is gone
 */
#include <fcntl.h>
#include <poll.h>
#include <stdbool.h>

#include "far_client.h"

static struct far_tester tester;
static int uffd;

static void say_again(int job)
{
	struct iswf_hello hello = {.magic = ISWF_MAGIC, .version = ISWF_VERSION};

	if (tester.ring != NULL) {
		hello.client = tester.welcome.client;
		memcpy(hello.token, tester.welcome.token, sizeof(hello.token));
		leave_far(&tester);
	}
	tester = connect_with(job, hello, uffd);
	printf("refused %d\n", tester.welcome.refused);
}

static void write_block(uint32_t block, int value)
{
	memset(iswf_bytes(tester.ring, ISWF_READ_SLOTS), value, ISWF_BLOCK_BYTES);
	printf("%d\n", far_do(&tester, ISWF_READ_SLOTS, ISWF_WRITE, block, 0, ISWF_BLOCK_PAGES));
}

static void read_block(uint32_t block, int value)
{
	const char *bytes = iswf_bytes(tester.ring, 0);
	int result = far_do(&tester, 0, ISWF_READ, block, 0, ISWF_BLOCK_PAGES);
	bool same = true;

	for (uint32_t i = 0; i < ISWF_BLOCK_BYTES && same; i++)
		same = bytes[i] == (char)value;
	printf("%d %s\n", result, same ? "same" : "other");
}

static void wait_gone(void)
{
	struct pollfd device = {.fd = tester.sock};

	CHECK(poll(&device, 1, 60000) == 1);
	printf("gone\n");
}

int main(int argc, char **argv)
{
	char line[64], word[16];
	unsigned int block, value;
	int job = argc == 2 ? atoi(argv[1]) : -1;

	CHECK(job >= 0);
	uffd = open_uffd();
	while (fgets(line, sizeof(line), stdin) != NULL) {
		int words = sscanf(line, "%15s %u %u", word, &block, &value);

		if (words == 1 && strcmp(word, "hello") == 0)
			say_again(job);
		else if (words == 3 && strcmp(word, "write") == 0)
			write_block(block, (int)value);
		else if (words == 3 && strcmp(word, "read") == 0)
			read_block(block, (int)value);
		else if (words == 1 && strcmp(word, "gone") == 0)
			wait_gone();
		else
			CHECK(false);
		fflush(stdout);
	}
	return 0;
}
