// SPDX-License-Identifier: Apache-2.0
/* Sealing, by each library of this build: threads at once, and the memory that it takes. */
#define _GNU_SOURCE 1
#define OWN_MAIN    1
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#include "seal_libraries.h"

/* -------------------------------------------------------------------------- threads */

#define WORKERS       16u
#define PAGES_PER_JOB 200u

struct worker {
	const struct iswi_seal_ops *ops;
	struct iswi_sealer *sealer;
	pthread_t thread;
	uint32_t number;
};

static void *work(void *opaque)
{
	const struct worker *worker = opaque;
	unsigned char plain[512], out[512], tag[ISWI_SEAL_TAG_BYTES];
	struct iswi_sealing what = {.data = &what.key, .data_bytes = sizeof(what.key)};

	what.bytes = sizeof(plain);
	for (uint32_t i = 0; i < PAGES_PER_JOB; i++) {
		what.key = (worker->number + i) % KEYS;
		fill(plain, sizeof(plain), worker->number * PAGES_PER_JOB + i);
		memcpy(what.nonce, plain, sizeof(what.nonce));
		what.in = plain;
		what.out = out;
		worker->ops->seal(worker->sealer, &what, tag);
		what.in = out;
		tag[i % sizeof(tag)] ^= (unsigned char)(i % 3 == 0);
		CHECK_EQ(worker->ops->open(worker->sealer, &what, tag), i % 3 != 0);
		CHECK(i % 3 == 0 ? all_zeros(out, sizeof(out))
				 : memcmp(out, plain, sizeof(out)) == 0);
	}
	return NULL;
}

TEST_CASES(test_threads_do_not_meet, LIBRARIES_MAX, n)
{
	const struct iswi_seal_ops *ops = library(n);
	struct iswi_sealer *sealer = make_sealer(ops);
	struct worker workers[WORKERS];

	if (sealer == NULL)
		return;
	for (uint32_t i = 0; i < WORKERS; i++) {
		workers[i] = (struct worker){.ops = ops, .sealer = sealer, .number = i};
		CHECK_EQ(pthread_create(&workers[i].thread, NULL, work, &workers[i]), 0);
	}
	for (uint32_t i = 0; i < WORKERS; i++)
		CHECK_EQ(pthread_join(workers[i].thread, NULL), 0);
	ops->destroy(sealer);
}

/*
 * More threads than a library may have contexts for are held in the middle of a page: they read
 * memory that cannot be read yet, and the signal handler keeps them until it can.
 */
#define CROWD 80u

static struct {
	unsigned char *page;
	atomic_uint held;
	atomic_bool readable;
} gate;

static void hold(int number)
{
	(void)number;
	atomic_fetch_add(&gate.held, 1);
	while (!atomic_load(&gate.readable))
		usleep(1000);
}

static void *seal_held_page(void *opaque)
{
	struct worker *worker = opaque;
	unsigned char out[ISW_PAGE_BYTES], tag[ISWI_SEAL_TAG_BYTES];
	struct iswi_sealing what = {.key = worker->number % KEYS, .in = gate.page, .out = out};

	what.bytes = sizeof(out);
	what.nonce[0] = (unsigned char)worker->number;
	worker->ops->seal(worker->sealer, &what, tag);
	what.in = out;
	CHECK(worker->ops->open(worker->sealer, &what, tag));
	CHECK(memcmp(out, gate.page, sizeof(out)) == 0);
	return NULL;
}

TEST_CASES(test_more_threads_than_contexts, LIBRARIES_MAX, n)
{
	const struct sigaction holding = {.sa_handler = hold};
	const struct iswi_seal_ops *ops = library(n);
	struct iswi_sealer *sealer = make_sealer(ops);
	static struct worker workers[CROWD];
	struct sigaction before;
	uint32_t held;

	if (sealer == NULL)
		return;
	atomic_store(&gate.held, 0);
	atomic_store(&gate.readable, false);
	gate.page = mmap(NULL, ISW_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
			 -1, 0);
	CHECK(gate.page != MAP_FAILED);
	fill(gate.page, ISW_PAGE_BYTES, 5);
	CHECK_EQ(mprotect(gate.page, ISW_PAGE_BYTES, PROT_NONE), 0);
	CHECK_EQ(sigaction(SIGSEGV, &holding, &before), 0);
	for (uint32_t i = 0; i < CROWD; i++) {
		workers[i] = (struct worker){.ops = ops, .sealer = sealer, .number = i};
		CHECK_EQ(pthread_create(&workers[i].thread, NULL, seal_held_page, &workers[i]), 0);
	}
	do {
		held = atomic_load(&gate.held);
		usleep(50000);
	} while (held == 0 || held != atomic_load(&gate.held));
	CHECK_EQ(mprotect(gate.page, ISW_PAGE_BYTES, PROT_READ), 0);
	atomic_store(&gate.readable, true);
	for (uint32_t i = 0; i < CROWD; i++)
		CHECK_EQ(pthread_join(workers[i].thread, NULL), 0);
	CHECK_EQ(sigaction(SIGSEGV, &before, NULL), 0);
	munmap(gate.page, ISW_PAGE_BYTES);
	ops->destroy(sealer);
}

/* --------------------------------------------------------------------------- memory */

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define COUNTS_ALLOCATIONS 0 /* malloc is the sanitizer's */
static _Thread_local uint64_t allocations;
#else
#define COUNTS_ALLOCATIONS 1
static _Thread_local uint64_t allocations;

/* The C library's own, under the names by which it has them beside those that a program replaces.
 */
void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *memory, size_t bytes);
void *__libc_memalign(size_t alignment, size_t bytes);
#define REPLACES           __attribute__((visibility("default")))

REPLACES void *malloc(size_t bytes)
{
	allocations++;
	return __libc_malloc(bytes);
}

REPLACES void *calloc(size_t count, size_t bytes)
{
	allocations++;
	return __libc_calloc(count, bytes);
}

REPLACES void *realloc(void *memory, size_t bytes)
{
	allocations++;
	return __libc_realloc(memory, bytes);
}

REPLACES void *memalign(size_t alignment, size_t bytes)
{
	allocations++;
	return __libc_memalign(alignment, bytes);
}

REPLACES int posix_memalign(void **out, size_t alignment, size_t bytes)
{
	allocations++;
	*out = __libc_memalign(alignment, bytes);
	return *out == NULL ? ENOMEM : 0;
}
#endif

/* In a thread that has not used the library before, with keys that change. */
static void *seal_without_memory(void *opaque)
{
	struct worker *worker = opaque;
	const struct iswi_seal_ops *ops = worker->ops;
	unsigned char key[ISWI_SEAL_KEY_BYTES], tag[ISWI_SEAL_TAG_BYTES], page[ISW_PAGE_BYTES];
	const struct iswi_sealing first = {.in = page, .out = page, .bytes = sizeof(page)};
	uint64_t before = allocations;

	memset(key, 1, sizeof(key));
	memset(page, 2, sizeof(page));
	for (uint32_t i = 0; i < 100; i++) {
		struct iswi_sealing what = first;

		what.key = i % KEYS;
		what.nonce[0] = (unsigned char)i;
		what.data = &what.key;
		what.data_bytes = sizeof(what.key);
		key[0] = (unsigned char)i;
		ops->set_key(worker->sealer, what.key, key);
		ops->seal(worker->sealer, &what, tag);
		tag[0] ^= (unsigned char)(i % 2);
		CHECK_EQ(ops->open(worker->sealer, &what, tag), i % 2 == 0);
	}
	CHECK_EQ(allocations, before);
	return NULL;
}

TEST_CASES(test_nothing_is_allocated_after_make, LIBRARIES_MAX, n)
{
	const struct iswi_seal_ops *ops = library(n);
	uint64_t before = allocations;
	struct worker worker = {.ops = ops, .sealer = make_sealer(ops)};

	if (worker.sealer == NULL)
		return;
	if (COUNTS_ALLOCATIONS)
		CHECK(allocations > before); /* so those of the library are counted */
	for (uint32_t thread = 0; thread < 3; thread++) {
		CHECK_EQ(pthread_create(&worker.thread, NULL, seal_without_memory, &worker), 0);
		CHECK_EQ(pthread_join(worker.thread, NULL), 0);
	}
	ops->destroy(worker.sealer);
}

/* VmFlags of the mapping that an address is in. */
static void read_flags(const void *address, char *flags_out, size_t bytes)
{
	FILE *smaps = fopen("/proc/self/smaps", "r");
	uintptr_t begin, end;
	bool here = false;
	char line[512];

	CHECK(smaps != NULL);
	flags_out[0] = '\0';
	while (fgets(line, sizeof(line), smaps) != NULL) {
		if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " ", &begin, &end) == 2)
			here = begin <= (uintptr_t)address && (uintptr_t)address < end;
		else if (here && strncmp(line, "VmFlags:", 8) == 0)
			snprintf(flags_out, bytes, "%s ", strtok(line + 8, "\n"));
	}
	fclose(smaps);
}

TEST_CASES(test_keys_are_in_no_core_dump_and_no_child, LIBRARIES_MAX, n)
{
	const struct iswi_seal_ops *ops = library(n);
	struct iswi_sealer *sealer = make_sealer(ops);
	char flags[512];

	if (sealer == NULL)
		return;
	read_flags(sealer, flags, sizeof(flags));
	CHECK(strstr(flags, " dd ") != NULL);
	CHECK(strstr(flags, " dc ") != NULL);
	ops->destroy(sealer);
	read_flags(sealer, flags, sizeof(flags));
	CHECK(strstr(flags, " dd ") == NULL);
}

TEST_CASES(test_destroy_takes_nothing, LIBRARIES_MAX, n)
{
	if (library(n) != NULL)
		library(n)->destroy(NULL);
}

int main(void)
{
	if (library(0) == NULL)
		SKIP("this build has no OpenSSL (libssl-dev)");
	return run_tests();
}
