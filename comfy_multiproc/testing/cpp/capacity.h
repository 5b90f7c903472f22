// The capacity file of comfy_multiproc/testing/card/capacity.py, which describes its layout: the same arithmetic under the
// same lock, so that processes of both forms share a card.
#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

class CapacityFile {
 public:
  struct Full { uint64_t requested, free, size; };

  void open(const std::string& path) {
    const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) throw std::runtime_error("virtual card: cannot open " + path + ": " + std::strerror(errno));
    struct stat st;
    if (::fstat(fd, &st) != 0 || st.st_size < off_t(kBlock * 8)) throw std::runtime_error("virtual card: " + path + " is too short to be a capacity file");
    void* p = ::mmap(nullptr, st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) throw std::runtime_error("virtual card: cannot map " + path);
    auto* w = static_cast<uint64_t*>(p);
    if (w[0] != kMagic || w[1] != kVersion || w[3] != kSlots || uint64_t(st.st_size) != (kBlock + w[2] * kBlock * (1 + kSlots)) * 8)
      throw std::runtime_error("virtual card: " + path + " is not a capacity file of version 1");
    path_ = path;
    fd_ = fd;
    words_ = w;
    pid_ = ::getpid();
    start_ = process_start(pid_);
  }

  int cards() const { return words_ ? int(words_[2]) : 0; }

  // False: it does not fit, and `full` says why. Bytes the process keeps in its cache are used first.
  bool allocate(int card, uint64_t n, Full* full) {
    if (forked()) throw std::runtime_error("virtual card: opened before a fork; start processes with spawn");
    Lock lock(*this);
    uint64_t* c = card_block(card);
    uint64_t* s = slot(card, full);
    if (!s) return false;
    const uint64_t from_cache = std::min<uint64_t>(n, s[kCached]), more = n - from_cache;
    uint64_t total = sum(card) + more;
    if (total > c[kPeakOfCard]) {
      reclaim(card);
      total = sum(card) + more;
    }
    if (total > c[kSize]) {
      c[kRefusalsOfCard] = c[kRefusalsOfCard] + 1;
      s[kRefusals] = s[kRefusals] + 1;
      *full = {n, c[kSize] - (total - more), c[kSize]};
      return false;
    }
    s[kCached] = s[kCached] - from_cache;
    s[kAllocated] = s[kAllocated] + n;
    mark(card, s);
    return true;
  }

  void release(int card, uint64_t n) {
    if (forked()) return;       // the bytes are its parent's
    Lock lock(*this);
    uint64_t* s = slot(card, nullptr);
    if (!s) return;
    s[kAllocated] = s[kAllocated] - n;
    if (words_[5]) s[kCached] = s[kCached] + n;
  }

 private:
  static constexpr uint64_t kMagic = 0x44524356464d4f43;    // "COMFVCRD"
  static constexpr uint64_t kVersion = 1, kSlots = 64, kBlock = 8;
  enum { kPid, kStart, kAllocated, kCached, kFixed, kPeak, kRefusals };
  enum { kSize, kPeakOfCard, kRefusalsOfCard };

  struct Lock {
    explicit Lock(CapacityFile& file) : file(file), thread(file.mutex_) {
      if (!file.words_) throw std::runtime_error("virtual card: no capacity file is open");
      const time_t began = ::time(nullptr);
      while (::flock(file.fd_, LOCK_EX | LOCK_NB) != 0) {
        if (::time(nullptr) - began > 10) throw std::runtime_error("virtual card: another process kept " + file.path_ + " locked for 10 s");
        ::usleep(50);
      }
    }
    ~Lock() { ::flock(file.fd_, LOCK_UN); }
    CapacityFile& file;
    std::lock_guard<std::mutex> thread;
  };

  static uint64_t process_start(uint64_t pid) {     // 0: gone, or a zombie
    char name[64], text[1024];
    std::snprintf(name, sizeof name, "/proc/%llu/stat", static_cast<unsigned long long>(pid));
    const int fd = ::open(name, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    const ssize_t n = ::read(fd, text, sizeof text - 1);
    ::close(fd);
    if (n <= 0) return 0;
    text[n] = 0;
    const char* p = std::strrchr(text, ')');        // the name before it may hold anything
    char state = 0;
    unsigned long long start = 0;
    if (!p || std::sscanf(p + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &state, &start) != 2) return 0;
    return state == 'Z' || state == 'X' ? 0 : start;
  }

  bool forked() const { return words_ && uint64_t(::getpid()) != pid_; }

  uint64_t* card_block(int card) {
    if (card < 0 || card >= cards()) throw std::runtime_error("virtual card: there is no card " + std::to_string(card));
    return words_ + kBlock + uint64_t(card) * kBlock * (1 + kSlots);
  }

  uint64_t* slot_at(int card, uint64_t i) { return card_block(card) + kBlock * (1 + i); }

  uint64_t sum(int card) {
    uint64_t total = 0;
    for (uint64_t i = 0; i < kSlots; i++) {
      uint64_t* s = slot_at(card, i);
      if (s[kPid]) total += s[kAllocated] + s[kCached] + s[kFixed];
    }
    return total;
  }

  void reclaim(int card) {
    for (uint64_t i = 0; i < kSlots; i++) {
      uint64_t* s = slot_at(card, i);
      if (s[kPid] && (s[kPid] != pid_ || s[kStart] != start_) && process_start(s[kPid]) != s[kStart]) s[kPid] = 0;
    }
  }

  void mark(int card, uint64_t* s) {
    uint64_t* c = card_block(card);
    c[kPeakOfCard] = std::max<uint64_t>(c[kPeakOfCard], sum(card));
    s[kPeak] = std::max<uint64_t>(s[kPeak], s[kAllocated] + s[kCached] + s[kFixed]);
  }

  // This process's slot, made if need be; null: its fixed cost does not fit.
  uint64_t* slot(int card, Full* full) {
    auto known = own_.find(card);
    if (known != own_.end()) return known->second;
    reclaim(card);
    uint64_t* empty = nullptr;
    for (uint64_t i = 0; i < kSlots; i++) {
      uint64_t* s = slot_at(card, i);
      if (s[kPid] == pid_ && s[kStart] == start_) return own_[card] = s;
      if (!empty && !s[kPid]) empty = s;
    }
    if (!empty) throw std::runtime_error("virtual card: more than 64 processes use " + path_);
    uint64_t* c = card_block(card);
    const uint64_t fixed = words_[4], free = c[kSize] - sum(card);
    if (fixed > free) {
      c[kRefusalsOfCard] = c[kRefusalsOfCard] + 1;
      if (full) *full = {fixed, free, c[kSize]};
      return nullptr;
    }
    empty[kStart] = start_;
    empty[kAllocated] = empty[kCached] = empty[kPeak] = empty[kRefusals] = 0;
    empty[kFixed] = fixed;
    empty[kPid] = pid_;
    own_[card] = empty;
    mark(card, empty);
    return empty;
  }

  std::string path_;
  int fd_ = -1;
  uint64_t* words_ = nullptr;
  uint64_t pid_ = 0, start_ = 0;
  std::map<int, uint64_t*> own_;
  std::mutex mutex_;
};
