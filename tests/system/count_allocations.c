// SPDX-License-Identifier: Apache-2.0
/*
 * Preloaded into a process: counts what the C library's threads ("isw-...") allocate and map, in
 * a file that a test reads: DIRECTORY/PID of INFINISWAP_TEST_ALLOCATIONS, laid out as struct
 * counts. The first few allocations after `armed` was set are kept with their thread and caller.
 */
#define _GNU_SOURCE 1
#include <dlfcn.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#define KEPT 32

struct counts {
	atomic_uint_fast64_t allocations; /* of the threads meant */
	atomic_uint_fast64_t maps;
	atomic_uint_fast64_t others; /* allocations of all other threads: proof that we are there */
	atomic_uint_fast64_t armed;  /* set by the test */
	atomic_uint_fast64_t kept;
	struct {
		char thread[16];
		uint64_t caller; /* an address in `object` */
		char object[104];
	} first[KEPT];
};

/* glibc's own: no dlsym, which allocates. */
extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t count, size_t bytes);
extern void *__libc_realloc(void *memory, size_t bytes);
extern void *__libc_memalign(size_t alignment, size_t bytes);

static struct counts nowhere, *counts = &nowhere;
/* Threads are named when they begin, once and for all. */
static _Thread_local int kind __attribute__((tls_model("initial-exec"))); /* 1 meant, 2 not */

static bool is_meant(void)
{
	char name[16] = "";

	if (kind == 0) {
		prctl(PR_GET_NAME, name);
		if (strncmp(name, "isw-", 4) == 0)
			kind = 1;
	}
	return kind == 1;
}

static void keep(const void *caller)
{
	uint64_t at = atomic_fetch_add(&counts->kept, 1);
	Dl_info info;

	if (at >= KEPT)
		return;
	prctl(PR_GET_NAME, counts->first[at].thread);
	counts->first[at].caller = (uintptr_t)caller;
	if (dladdr(caller, &info) != 0 && info.dli_fname != NULL) {
		counts->first[at].caller -= (uintptr_t)info.dli_fbase;
		snprintf(counts->first[at].object, sizeof(counts->first[at].object), "%s %s",
			 info.dli_sname != NULL ? info.dli_sname : "?", info.dli_fname);
	}
}

static void count(atomic_uint_fast64_t *counter, const void *caller)
{
	if (!is_meant()) {
		atomic_fetch_add(&counts->others, 1);
		return;
	}
	atomic_fetch_add(counter, 1);
	if (atomic_load(&counts->armed) != 0)
		keep(caller);
}

#define COUNT(member) count(&counts->member, __builtin_return_address(0))

void *malloc(size_t bytes)
{
	COUNT(allocations);
	return __libc_malloc(bytes);
}

void *calloc(size_t count_, size_t bytes)
{
	COUNT(allocations);
	return __libc_calloc(count_, bytes);
}

void *realloc(void *memory, size_t bytes)
{
	COUNT(allocations);
	return __libc_realloc(memory, bytes);
}

void *memalign(size_t alignment, size_t bytes)
{
	COUNT(allocations);
	return __libc_memalign(alignment, bytes);
}

void *aligned_alloc(size_t alignment, size_t bytes)
{
	COUNT(allocations);
	return __libc_memalign(alignment, bytes);
}

int posix_memalign(void **memory, size_t alignment, size_t bytes)
{
	COUNT(allocations);
	*memory = __libc_memalign(alignment, bytes);
	return *memory == NULL ? 12 : 0;
}

void *mmap(void *address, size_t bytes, int protection, int flags, int fd, off_t offset)
{
	static void *(*real)(void *, size_t, int, int, int, off_t);

	if (real == NULL)
		*(void **)&real = dlsym(RTLD_NEXT, "mmap");
	COUNT(maps);
	return real(address, bytes, protection, flags, fd, offset);
}

__attribute__((constructor)) static void start(void)
{
	const char *directory = getenv("INFINISWAP_TEST_ALLOCATIONS");
	char path[4096];
	void *shared;
	int fd;

	if (directory == NULL)
		return;
	snprintf(path, sizeof(path), "%s/%d", directory, getpid());
	fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	if (fd < 0 || ftruncate(fd, sizeof(struct counts)) != 0)
		abort();
	shared = mmap(NULL, sizeof(struct counts), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (shared == MAP_FAILED)
		abort();
	close(fd);
	counts = shared;
}
