// SPDX-License-Identifier: Apache-2.0
/* Keys of devices: made, saved, loaded, handed over, forgotten; and where they lie. */
#define _GNU_SOURCE 1
#define OWN_MAIN    1
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "seal_libraries.h"

/* The kernel (CMake: --wrap) is one without secret memory, or one before Linux 6.3. */
static bool no_secret_memory, no_noexec_seal;

long __real_syscall(long number, ...);
long __wrap_syscall(long number, ...);
int __real_memfd_create(const char *name, unsigned int flags);
int __wrap_memfd_create(const char *name, unsigned int flags);

long __wrap_syscall(long number, ...)
{
	long arg[6];
	va_list args;

#ifdef SYS_memfd_secret
	if (number == SYS_memfd_secret && no_secret_memory) {
		errno = ENOSYS;
		return -1;
	}
#endif
	va_start(args, number);
	for (uint32_t i = 0; i < 6; i++)
		arg[i] = va_arg(args, long);
	va_end(args);
	return __real_syscall(number, arg[0], arg[1], arg[2], arg[3], arg[4], arg[5]);
}

int __wrap_memfd_create(const char *name, unsigned int flags)
{
	if (no_noexec_seal && flags & 0x0008u) {
		errno = EINVAL;
		return -1;
	}
	return __real_memfd_create(name, flags);
}

/* Each of these tests runs on each such kernel. */
#define KERNELS 3u

static void begin_kernel(uint32_t kernel)
{
	no_secret_memory = kernel >= 1;
	no_noexec_seal = kernel >= 2;
}

static int32_t make_one(void)
{
	struct isw_error error = {0};
	int32_t fd;

	CHECK_OK(isw_seal_key_make(&fd, &error), error);
	CHECK(fd >= 0);
	return fd;
}

TEST_CASES(test_each_key_is_another, KERNELS, kernel)
{
	unsigned char one[ISWI_SEAL_KEY_BYTES], other[ISWI_SEAL_KEY_BYTES];
	int32_t one_fd, other_fd;

	begin_kernel(kernel);
	one_fd = make_one();
	other_fd = make_one();
	CHECK_EQ(iswi_seal_key_read(one_fd, one, NULL), 0);
	CHECK_EQ(iswi_seal_key_read(other_fd, other, NULL), 0);
	CHECK(memcmp(one, other, sizeof(one)) != 0);
	CHECK(!all_zeros(one, sizeof(one)));
	CHECK_EQ(iswi_seal_key_read(one_fd, other, NULL), 0);
	CHECK(memcmp(one, other, sizeof(one)) == 0);
	CHECK(fcntl(one_fd, F_GETFD) & FD_CLOEXEC);
	close(one_fd);
	close(other_fd);
}

/* Nobody who has it can shrink it, which would end its readers with SIGBUS. */
TEST_CASES(test_its_size_stays, KERNELS, kernel)
{
	int32_t fd;

	begin_kernel(kernel);
	fd = make_one();
	CHECK(ftruncate(fd, 0) != 0);
	CHECK(ftruncate(fd, 2l * ISW_PAGE_BYTES) != 0);
	close(fd);
}

TEST_CASES(test_another_process_has_it_by_its_descriptor, KERNELS, kernel)
{
	unsigned char mine[ISWI_SEAL_KEY_BYTES], theirs[ISWI_SEAL_KEY_BYTES];
	int ends[2], status;
	int32_t fd;
	pid_t child;

	begin_kernel(kernel);
	fd = make_one();
	CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
	child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		if (iswi_seal_key_read(fd, theirs, NULL) != 0 ||
		    write(ends[1], theirs, sizeof(theirs)) != (ssize_t)sizeof(theirs) ||
		    read(ends[1], theirs, 1) != 1)
			_exit(1);
		_exit(iswi_seal_key_read(fd, theirs, NULL) == -EBADF ? 0 : 2);
	}
	CHECK_EQ(iswi_seal_key_read(fd, mine, NULL), 0);
	CHECK_EQ(read(ends[0], theirs, sizeof(theirs)), sizeof(theirs));
	CHECK(memcmp(mine, theirs, sizeof(mine)) == 0);
	/* Forgotten here, it is forgotten there. */
	CHECK_EQ(isw_seal_key_forget(fd), 0);
	CHECK_EQ(write(ends[0], "", 1), 1);
	CHECK_EQ(waitpid(child, &status, 0), child);
	CHECK_EQ(status, 0);
	close(ends[0]);
	close(ends[1]);
	close(fd);
}

TEST_CASES(test_a_forgotten_key_is_none, KERNELS, kernel)
{
	static const uint8_t host_key[ISW_SEAL_KEY_BYTES];
	unsigned char key[ISWI_SEAL_KEY_BYTES] = {0}, *page;
	uint8_t sealed[ISW_SEALED_KEY_BYTES] = {0};
	struct isw_error error = {0};
	int32_t fd, copy;

	begin_kernel(kernel);
	fd = make_one();
	copy = dup(fd);
	page = mmap(NULL, ISW_PAGE_BYTES, PROT_READ, MAP_SHARED, fd, 0);
	CHECK(page != MAP_FAILED);
	CHECK(!all_zeros(page, ISW_PAGE_BYTES));
	CHECK_EQ(isw_seal_key_forget(fd), 0);
	CHECK(all_zeros(page, ISW_PAGE_BYTES));
	munmap(page, ISW_PAGE_BYTES);
	CHECK_EQ(iswi_seal_key_read(copy, key, &error), -EBADF);
	CHECK(strstr(error.text, "forgotten") != NULL);
	CHECK_EQ(isw_seal_key_save(copy, host_key, sealed, &error), -EBADF);
	CHECK_EQ(isw_seal_key_forget(copy), -EBADF);
	CHECK(all_zeros(key, sizeof(key)));
	CHECK(all_zeros(sealed, sizeof(sealed)));
	close(copy);
	close(fd);
}

static void check_no_key(int fd)
{
	static const uint8_t host_key[ISW_SEAL_KEY_BYTES];
	uint8_t sealed[ISW_SEALED_KEY_BYTES];
	unsigned char key[ISWI_SEAL_KEY_BYTES];
	struct isw_error error = {0};

	CHECK_EQ(iswi_seal_key_read(fd, key, &error), -EBADF);
	CHECK_EQ(error.code, -EBADF);
	CHECK_EQ(isw_seal_key_save(fd, host_key, sealed, NULL), -EBADF);
	CHECK_EQ(isw_seal_key_forget(fd), -EBADF);
}

TEST(test_other_descriptors_are_no_keys)
{
	int ends[2], fd, null = open("/dev/null", O_RDWR | O_CLOEXEC);

	check_no_key(-1);
	check_no_key(null);
	close(null);
	check_no_key(null);
	CHECK_EQ(pipe(ends), 0);
	check_no_key(ends[0]);
	close(ends[0]);
	close(ends[1]);
	fd = memfd_create("no key", MFD_CLOEXEC);
	check_no_key(fd);
	CHECK_EQ(ftruncate(fd, ISW_PAGE_BYTES), 0);
	check_no_key(fd);
	CHECK_EQ(pwrite(fd, "infiniswap key0", 16, 0), 16);
	check_no_key(fd);
	CHECK_EQ(ftruncate(fd, 16), 0);
	check_no_key(fd);
	close(fd);
}

/* -------------------------------------------------------------------------- on disk */

TEST_CASES(test_a_saved_key_comes_back, KERNELS, kernel)
{
	uint8_t host_key[ISW_SEAL_KEY_BYTES], sealed[ISW_SEALED_KEY_BYTES],
		again[ISW_SEALED_KEY_BYTES];
	unsigned char key[ISWI_SEAL_KEY_BYTES], loaded[ISWI_SEAL_KEY_BYTES];
	struct isw_error error = {0};
	int32_t fd, loaded_fd;

	begin_kernel(kernel);
	fill(host_key, sizeof(host_key), 6);
	fd = make_one();
	CHECK_EQ(iswi_seal_key_read(fd, key, NULL), 0);
	CHECK_OK(isw_seal_key_save(fd, host_key, sealed, &error), error);
	CHECK_OK(isw_seal_key_save(fd, host_key, again, &error), error);
	CHECK(memcmp(sealed, again, 12) != 0); /* nonces */
	CHECK(memmem(sealed, sizeof(sealed), key, 8) == NULL);
	CHECK_EQ(isw_seal_key_forget(fd), 0);
	close(fd);
	CHECK_OK(isw_seal_key_load(sealed, host_key, &loaded_fd, &error), error);
	CHECK_EQ(iswi_seal_key_read(loaded_fd, loaded, NULL), 0);
	CHECK(memcmp(key, loaded, sizeof(key)) == 0);
	close(loaded_fd);
}

static void check_rejected(const uint8_t *sealed, const uint8_t *host_key)
{
	struct isw_error error = {0};
	int32_t fd = -7;

	CHECK_EQ(isw_seal_key_load(sealed, host_key, &fd, &error), -EKEYREJECTED);
	CHECK_EQ(error.code, -EKEYREJECTED);
	CHECK_EQ(fd, -7);
}

TEST(test_another_host_key_or_an_altered_bit_is_rejected)
{
	uint8_t host_key[ISW_SEAL_KEY_BYTES], sealed[ISW_SEALED_KEY_BYTES];
	struct isw_error error = {0};
	int32_t fd;

	begin_kernel(0);
	fill(host_key, sizeof(host_key), 7);
	fd = make_one();
	CHECK_OK(isw_seal_key_save(fd, host_key, sealed, &error), error);
	close(fd);
	for (uint32_t i = 0; i < sizeof(sealed); i++) {
		sealed[i] ^= (uint8_t)(1u << i % 8);
		check_rejected(sealed, host_key);
		sealed[i] ^= (uint8_t)(1u << i % 8);
	}
	host_key[31] ^= 0x80;
	check_rejected(sealed, host_key);
	host_key[31] ^= 0x80;
	CHECK_OK(isw_seal_key_load(sealed, host_key, &fd, &error), error);
	close(fd);
}

/* --------------------------------------------------------------------- where it lies */

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
/* (A sanitizer keeps terabytes of its own.) */
#define MASK 0x5au

/* How often the key is in memory of this process; it is given masked, so as not to be found. */
static uint32_t count_in(const volatile unsigned char *memory, size_t bytes,
			 const unsigned char *masked)
{
	uint32_t found = 0;

	for (size_t at = 0; at + ISWI_SEAL_KEY_BYTES / 2 <= bytes; at++) {
		uint32_t same = 0;

		while (same < ISWI_SEAL_KEY_BYTES / 2 && (memory[at + same] ^ MASK) == masked[same])
			same++;
		found += same == ISWI_SEAL_KEY_BYTES / 2;
	}
	return found;
}

static uint32_t count_everywhere(const unsigned char *masked)
{
	FILE *maps = fopen("/proc/self/maps", "r");
	uintptr_t begin, end;
	uint32_t found = 0;
	char line[512], rights[8];

	CHECK(maps != NULL);
	while (fgets(line, sizeof(line), maps) != NULL) {
		CHECK_EQ(sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %7s", &begin, &end, rights), 3);
		if (strncmp(rights, "rw", 2) == 0)
			found += count_in((const volatile unsigned char *)begin, end - begin,
					  masked);
	}
	fclose(maps);
	return found;
}

/* After each call the key is nowhere in this process: not even half of it. */
TEST_CASES(test_calls_leave_no_copies, KERNELS, kernel)
{
	static unsigned char masked[ISWI_SEAL_KEY_BYTES];
	static const uint8_t host_key[ISW_SEAL_KEY_BYTES] = {1};
	unsigned char key[ISWI_SEAL_KEY_BYTES];
	uint8_t sealed[ISW_SEALED_KEY_BYTES];
	int32_t fd;

	begin_kernel(kernel);
	fd = make_one();
	CHECK_EQ(iswi_seal_key_read(fd, key, NULL), 0);
	for (uint32_t i = 0; i < sizeof(masked); i++)
		masked[i] = key[i] ^ MASK;
	CHECK_EQ(count_everywhere(masked), 1);
	iswi_seal_forget(key, sizeof(key));
	CHECK_EQ(count_everywhere(masked), 0);
	CHECK_EQ(isw_seal_key_save(fd, host_key, sealed, NULL), 0);
	CHECK_EQ(count_everywhere(masked), 0);
	close(fd);
	CHECK_EQ(isw_seal_key_load(sealed, host_key, &fd, NULL), 0);
	CHECK_EQ(count_everywhere(masked), 0);
	close(fd);
}
#endif

int main(void)
{
	if (library(0) == NULL)
		SKIP("this build has no OpenSSL (libssl-dev)");
	return run_tests();
}
