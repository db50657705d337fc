/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The digest by which it is known that a page is as it left: NH of 64-bit words (Black, Halevi,
 * Krawczyk, Krovetz, Rogaway: UMAC, Fast and Secure Message Authentication, CRYPTO 1999). Of two
 * different pages, whoever chose them without the key, 128 bits are equal with a chance of 2^-64.
 * It reads a page in about the time that a copy of it takes.
 */
#include <errno.h>
#include <sys/random.h>

#include "far/agent.h"

#define WORDS (ISWF_PAGE_BYTES / sizeof(uint64_t))

__extension__ typedef unsigned __int128 wide;
typedef uint64_t __attribute__((may_alias)) word;

static uint64_t key[WORDS];

int iswf_digest_init(void)
{
	size_t got = 0;

	while (got < sizeof(key)) {
		ssize_t more = getrandom((char *)key + got, sizeof(key) - got, 0);

		if (more < 0 && errno != EINTR)
			return -errno;
		got += more > 0 ? (size_t)more : 0;
	}
	return 0;
}

struct iswf_digest iswf_digest(const char *page)
{
	const word *words = (const word *)(const void *)page;
	wide sum = 0;

	for (size_t i = 0; i < WORDS; i += 2)
		sum += (wide)(words[i] + key[i]) * (words[i + 1] + key[i + 1]);
	return (struct iswf_digest){(uint64_t)sum, (uint64_t)(sum >> 64)};
}
