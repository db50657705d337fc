/* SPDX-License-Identifier: Apache-2.0 */
/* The functions behind ours: the next allocator's and libc's. */
#ifndef ISWF_REAL_H
#define ISWF_REAL_H

#include <pthread.h>
#include <stddef.h>
#include <sys/types.h>

struct iswf_real {
	void *(*malloc)(size_t);
	void *(*calloc)(size_t, size_t);
	void *(*realloc)(void *, size_t);
	void (*free)(void *);
	void *(*memalign)(size_t, size_t);
	void *(*aligned_alloc)(size_t, size_t);
	int (*posix_memalign)(void **, size_t, size_t);
	size_t (*malloc_usable_size)(void *);
	void *(*mmap)(void *, size_t, int, int, int, off_t);
	int (*munmap)(void *, size_t);
	void *(*mremap)(void *, size_t, size_t, int, ...);
	int (*madvise)(void *, size_t, int);
	int (*mprotect)(void *, size_t, int);
	int (*mlock)(const void *, size_t);
	int (*mlock2)(const void *, size_t, unsigned int);
	int (*mlockall)(int);
	int (*prctl)(int, ...);
	long (*syscall)(long, ...);
	int (*ioctl)(int, unsigned long, ...);
	int (*close)(int);
	int (*close_range)(unsigned int, unsigned int, int);
	void (*closefrom)(int);
	int (*dup2)(int, int);
	int (*dup3)(int, int, int);
	void (*pthread_exit)(void *);
	pid_t (*fork_alone)(void); /* _Fork; NULL before glibc 2.34 */
	int (*pthread_attr_setstack)(pthread_attr_t *, void *, size_t);
};

/* Looked up at the first call; never NULL. Functions that an older libc lacks are NULL. */
const struct iswf_real *iswf_real(void);

#endif
