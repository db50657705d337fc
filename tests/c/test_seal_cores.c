// SPDX-License-Identifier: Apache-2.0
/*
 * What a core file holds that somebody insists on, of all mappings that the kernel lets it have
 * (coredump_filter 0x33 and more): nothing from which a page key could be read. It is looked for
 * here, in the mappings that are not marked to be left out.
 */
#define OWN_MAIN
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <sys/random.h>
#include <unistd.h>

#include "seal_libraries.h"
#include "util/util.h"

#define HALF (ISWI_SEAL_KEY_BYTES / 2) /* an expanded key begins with these two */

/* Not the key itself, which would be found here. */
static unsigned char hidden[ISWI_SEAL_KEY_BYTES];

static bool is_key_at(const unsigned char *bytes)
{
	uint32_t first = 0, second = 0;

	for (uint32_t i = 0; i < HALF; i++) {
		first += (unsigned char)~bytes[i] == hidden[i];
		second += (unsigned char)~bytes[i] == hidden[HALF + i];
	}
	return first == HALF || second == HALF;
}

/* How often a half of the key is in that mapping. */
static uint32_t count_in(int memory, uintptr_t begin, uintptr_t end)
{
	static unsigned char bytes[1u << 20];
	uint32_t found = 0;

	while (begin < end) {
		size_t want = ISWI_MIN(end - begin, sizeof(bytes));
		ssize_t n = pread(memory, bytes, want, (off_t)begin);

		if (n < (ssize_t)HALF)
			break; /* [vvar] */
		for (size_t i = 0; i + HALF <= (size_t)n; i++)
			found += is_key_at(bytes + i);
		begin += (size_t)n == want && want == sizeof(bytes) ? (size_t)n - HALF + 1
								    : (size_t)n;
	}
	memset(bytes, 0, sizeof(bytes));
	return found;
}

/* left_out: what is marked so, else all others. */
static uint32_t count_keys(bool left_out)
{
	FILE *smaps = fopen("/proc/self/smaps", "r");
	int memory = open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
	uintptr_t begin = 0, end = 0;
	char line[512], mode[8] = "";
	uint32_t found = 0;

	CHECK(smaps != NULL && memory >= 0);
	while (fgets(line, sizeof(line), smaps) != NULL) {
		uintptr_t from, to;

		if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %7s", &from, &to, mode) == 3) {
			begin = from;
			end = to;
		}
		if (strncmp(line, "VmFlags:", 8) != 0 || mode[0] != 'r')
			continue;
		line[strcspn(line, "\n")] = '\0';
		if ((strstr(line, " dd") != NULL) == left_out)
			found += count_in(memory, begin, end);
	}
	close(memory);
	fclose(smaps);
	return found;
}

static void set_random_key(const struct iswi_seal_ops *ops, struct iswi_sealer *sealer)
{
	unsigned char key[ISWI_SEAL_KEY_BYTES];

	CHECK_EQ(getrandom(key, sizeof(key), 0), sizeof(key));
	ops->set_key(sealer, 0, key);
	for (uint32_t i = 0; i < sizeof(key); i++)
		hidden[i] = (unsigned char)~key[i];
	iswi_seal_forget(key, sizeof(key));
}

TEST_CASES(test_a_core_with_all_mappings_has_no_key, LIBRARIES_MAX, n)
{
	static unsigned char page[ISW_PAGE_BYTES], tag[ISWI_SEAL_TAG_BYTES];
	const struct iswi_seal_ops *ops = library(n);
	const struct iswi_sealing what = {.in = page, .out = page, .bytes = sizeof(page)};
	struct iswi_sealer *sealer = make_sealer(ops);

	if (sealer == NULL)
		return;
	set_random_key(ops, sealer);
	ops->seal(sealer, &what, tag);
	CHECK(ops->open(sealer, &what, tag));
	CHECK(count_keys(true) >= 1); /* so it would be found */
	printf("%s: %u in what a core has\n", ops->name, count_keys(false));
	CHECK_EQ(count_keys(false), 0);
	ops->destroy(sealer);
	CHECK_EQ(count_keys(true) + count_keys(false), 0);
}

int main(void)
{
	if (library(0) == NULL)
		SKIP("this build has no OpenSSL (libssl-dev)");
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
	SKIP("a sanitizer's heap is not the one that programs have");
#endif
	return run_tests();
}
